//! Builders and a fabric in memory with faults and a seed (feature `testing`).
