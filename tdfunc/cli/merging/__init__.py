"""`merge`: models merged leaf by leaf, as options or a configuration file of mergekit describe it."""
