"""What a layout costs: operations counted as `ops` count them, rates of the machine, transfers."""
