//! guest-driver
