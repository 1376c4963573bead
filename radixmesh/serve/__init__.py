"""The whole mesh on one machine: NATS and every service as child processes of one command."""
