// Exists to compile the precompiled headers of the tests.
