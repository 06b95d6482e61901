"""What rows keep on the device, one file a feature: see `RowFeature`. `make_state` lists those that an engine has."""
