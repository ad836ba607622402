"""A shop on Flask, a scoped session and psycopg, whose payments are answered by webhooks.

In the order of what happens to an order:

* `app`: `POST /orders` stores the order and its `ChargeOrder` job in one commit; the webhooks come in here too;
* `jobs`: what the jobs carry and do, and what follows: register a callback, then tell the provider;
* `provider`: the payment provider, and a fake one to try things with;
* `models`, `database`, `settings`: the table, the sessions, the environment; `__main__`: all of it in one command.
"""
