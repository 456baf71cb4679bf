"""The tables of numbers in README and docs, made of the files in docs/data and docs/evidence.

    python -m tools.tables           writes them into the pages
    python -m tools.tables --check   says which of them differ, and writes nothing

A run of a benchmark with ``--json docs/data/NAME.json`` and then the first of these bring a table
up to date. The first line of a table stays as it is in the page: by that it is found.
"""
