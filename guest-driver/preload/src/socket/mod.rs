//! What is known of one descriptor: a TCP socket on its way to SMC or there, or an epoll set.

pub(crate) mod descriptors;
pub(crate) mod epoll_set;
pub(crate) mod owner_pipe;
pub(crate) mod registrations;
pub(crate) mod sleeper;
pub(crate) mod stream;
pub(crate) mod table;
