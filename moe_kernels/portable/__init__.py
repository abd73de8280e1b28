"""The ops on grouped matrix products of torch: any CPU, any GPU."""
