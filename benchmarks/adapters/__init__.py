"""One module for each peer, run with that peer's own interpreter.

`common` has the interface and the command line, `app` the table of the user's application. Started as
`python -m benchmarks.adapters MODULE:CLASS COMMAND`.
"""
