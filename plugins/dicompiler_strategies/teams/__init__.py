"""Teams: runs of consecutive layers, each run on one device or on several devices that split its layers."""
