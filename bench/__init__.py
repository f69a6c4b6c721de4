"""zeroscale's harness: from a specification to a measured record of one real DeepSpeed run."""
