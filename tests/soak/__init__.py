"""The soak: workers as real processes, hurt while they work, and an audit of what the database says afterwards.

`app` is the application they run, `worker` one process, `proxy` what stands between it and PostgreSQL, `fleet` all of
them; `load` enqueues, `chaos` hurts, `audit` looks for what was lost or doubled, `soak` ties them together.
"""
