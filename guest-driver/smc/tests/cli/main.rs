//! The `smc` command as its users run it.

mod demo;
mod help;
mod perf;
mod pipe;
mod support;
