"""The HTTP side: routing, bodies, answers, streams. Plain ASGI, so that the framework and the server can be exchanged."""
