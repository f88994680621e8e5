"""The learning half of Livebed: events in, live model out. Knows nothing of HTTP or gRPC."""
