"""FedPC: clients grouped by class prototypes, extractors and prototypes mixed across similar groups."""
