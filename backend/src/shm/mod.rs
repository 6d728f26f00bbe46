//! Memory that the daemon shares between two front ends.
