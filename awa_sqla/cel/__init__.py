"""Policies: CEL expressions that say what a callback's payload means. Extra `[cel]`.

`policy` holds `CallbackPolicy` and what may come of one; `evaluator` evaluates it in a process of its own, which
`child` is. A payload comes from outside, and no check of an expression bounds what it costs: a list of 1,000 items and
a text of 60 KB take `payload.items.map(i, payload.text)` five seconds, with the interpreter locked, and a deep enough
nest of lists ends the process. So the process is one that can be killed.

Nothing here knows the database.
"""
