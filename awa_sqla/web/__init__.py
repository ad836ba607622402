"""HTTP in front of the queue: what the outside world may send. Needs the extra `web` (starlette, uvicorn).

`callbacks` is the door: the router that an app mounts. Behind it, in the order of a request: `bodies` reads what was
sent, `answers` holds every answer there is, `transaction` resolves the callback in one transaction of the app's
sessions, `receipts` answers the same request again the same, `openapi` describes it all.

This room calls the verbs of `awa_sqla.session` and nothing below them; it imports no framework but starlette, and the
rest of the package never imports it.
"""
