"""Where models come from: a small registry, local files, the hub, and the cache of what was fetched and converted."""
