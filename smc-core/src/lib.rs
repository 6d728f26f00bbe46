//! smc-core
