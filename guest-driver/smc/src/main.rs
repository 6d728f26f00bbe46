//! smc
fn main() {}
