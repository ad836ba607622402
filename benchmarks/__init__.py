"""awa_sqla beside its peers, measured in one run: `python benchmarks/run.py`.

`run` is the command line, `environments` the peers' virtual environments and the server, `harness` the databases,
processes and counters of one measurement, `measures` what is measured and the goals, `report` the tables. `adapters`
is the only part that runs inside the peers' environments; it imports nothing from the others.

`idle` and `memory` are command lines of their own, about one worker that runs for longer; `lasting` starts it, and
`lasting_apps` is what it runs.
"""
