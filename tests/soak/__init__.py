"""The soak: workers as real processes, hurt while they work, and an audit of what the database says afterwards.

`app` is the application they run, and `tables` what it leaves; `worker` is one process, `proxy` what stands between it
and PostgreSQL, `fleet` all of them. `load` enqueues, `outside` answers callbacks, `chaos` hurts, `audit` looks for what
was lost or doubled, and `soak` ties them together.
"""
