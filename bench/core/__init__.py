"""Values that all packages share: specs, records, studies, networks and facts of engines. None imports torch."""
