"""The broker without input and output: requests go in with the time, responses come out when they are due."""
