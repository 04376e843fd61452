"""A broker in a cluster: registration, views of the cluster, controller and replicas."""
