"""Deep policies: exported whole, with a manifest that says what they are."""
