"""Values that other packages share, without torch: specs, records, studies, networks and facts of engines."""
