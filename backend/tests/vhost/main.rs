//! The daemon as a front end sees it: sessions over vhost-user, hostile front ends, the management
//! socket, and the program itself.

mod front_end;
mod hostile;
mod management;
mod program;
mod session;
