"""The tables of numbers in README and docs, made of the files in docs/data and docs/evidence.

    python -m tools.tables           writes them
    python -m tools.tables --check   says which of them differ, and writes nothing

A table is docs/tables/NAME.md, which pages include; README can't include, and has its tables behind
comments with their names. A run of a benchmark with ``--json docs/data/NAME.json`` and then the
first of these bring one up to date. For a new table write its first two lines there, and a function
``table_NAME`` in a module that ``_registry.py`` lists.
"""
