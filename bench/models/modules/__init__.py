"""What several families are built of, with torch: no family by itself."""
