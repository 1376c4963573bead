"""The APIs that the gateway speaks. Each one turns its requests into a Plan, and deltas into its own events and answers."""
