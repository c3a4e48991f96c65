"""Logs of servers and of NCCL, read line by line against patterns in `doctor/data`."""
