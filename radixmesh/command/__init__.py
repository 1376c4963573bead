"""The `radixmesh` command."""
