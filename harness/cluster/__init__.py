"""Runs on a Ray cluster: the items of a plan are handed to actors, one after the other, and their results come back.

Ray is imported by `ray_calls` and `actor` only, when a run asks for a cluster. `resources` says what the cluster has,
`travel` takes the folders of the run to its nodes, `actor` and `stream` run items there, `ledger` keeps account of
them, `team` hands them out, `cluster_run` makes a `Run` of it all.
"""
