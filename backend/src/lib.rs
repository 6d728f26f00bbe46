//! `vhost-device-ism`: a vhost-user daemon that emulates the virtio-ism device.
//!
//! [`device`] is the device without virtio, [`shm`] the memory it shares between front ends.
#![deny(unsafe_code)]

pub mod device;
pub mod shm;
