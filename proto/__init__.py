"""Wire contracts: `.proto` files and the stubs generated from them (`python -m proto.gen`)."""
