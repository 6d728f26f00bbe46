//! Failover of a connection to another link: validation, and what is written again (RFC 7609 section
//! 4.6).
