"""Damaged inputs for everything of fedem that reads: small valid ones, ways to damage them, and who judges the outcome.

mutations    what is done to bytes, trees of values, tables, arrays, tensor files and archives
harness      one input for one reader: how long and how much memory it may take, and what counts as a failure
samples      tables, arrays, prepared data, archives of public data sets, graphs
runs         configurations, experiments, folders of runs and of studies, new rows for a run
models       exported models, weights to start from
deployed     plans, kept files, messages of servers, clients and peers, certificates
census       which module of fedem reads what, and who tries it

``scripts/fuzz`` runs many inputs and prints a table; the suite runs some, by the same code.
"""
