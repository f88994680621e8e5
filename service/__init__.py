"""The answering half of Livebed: a thin face over the reading half of `trainer`."""
