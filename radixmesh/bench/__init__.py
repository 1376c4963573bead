"""`radixmesh bench`: load a server with the kinds of work that prefix caches and schedulers exist for, and show what it did."""
