"""The administrative client: raw requests to the brokers of any Kafka cluster, over TLS and SASL where needed.

confluent-kafka's AdminClient serves where it can. Requests it does not have (transactions as an administrator sees
them, the deletion of single committed offsets, the epochs of consumer groups), and those it cannot be trusted with (it
ends the process when a coordinator has moved), go through `brokers.Brokers`.
"""
