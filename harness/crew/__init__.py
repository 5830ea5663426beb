"""Runs: the items of a plan are handed to actors, processes of this machine or of a Ray cluster, and results come back.

`actor` runs items. `ledger` keeps account of them, a `team` of actors for one kind of device works on them, and
`campaign` makes a `Run` of it all. Here `local_pool` has the actors, and `pytest_shell` lets pytest choose items. On a
cluster `ray_calls` has them, `resources` says what there is, and `travel` takes the folders of the run to its nodes;
Ray is imported by `ray_calls` only, when a run asks for a cluster.
"""
