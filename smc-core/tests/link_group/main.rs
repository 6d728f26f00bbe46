//! Two link groups that talk to each other.

mod support;
mod tables;

mod collisions;
mod deletion;
mod failover;
mod first_contact;
mod golden;
mod hostile;
mod links;
mod rkeys;
