"""One attention call: its sizes, its mask and its definition. No backend runs here."""
