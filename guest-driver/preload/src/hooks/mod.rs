//! The exported functions. Each is thin: it looks the descriptor up, passes the call on if that is not
//! ours, and otherwise turns the program's pointers into slices for the rooms that do the work.

mod bytes;
mod descriptors;
mod fortify;
mod init;
mod libc_symbols;
mod readiness;
mod sockets;
