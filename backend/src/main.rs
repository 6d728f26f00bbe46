//! vhost-device-ism
fn main() {}
