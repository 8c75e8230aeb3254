"""Where what we run comes from: the locks as data, a bill of materials, an audit against advisories."""
