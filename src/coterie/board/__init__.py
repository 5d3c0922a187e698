"""`coterie board`: a live page about runs and a federation, in the browser (extra `board`)."""
