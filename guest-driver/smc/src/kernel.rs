// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! AF_SMC of the kernel, and obstacles to its use.

pub(crate) use af_smc::{
    Carrier, Change, Cursors, Device, Socket, change, devices, has_sockets, seid, sockets, ueids,
};

/// The obstacle to SMC-D by AF_SMC, if any.
pub(crate) fn obstacle() -> Option<String> {
    if !has_sockets() {
        return Some("the kernel has no AF_SMC (CONFIG_SMC; \"modprobe smc\")".into());
    }
    match devices() {
        Ok(devices) if devices.is_empty() => {
            return Some("the kernel has no ISM device (guest-driver/kernel)".into());
        }
        Ok(_) => {}
        Err(error) => return Some(format!("{}: {error}", af_smc::DIBS)),
    }
    match ueids() {
        Ok(ueids) if ueids.is_empty() => {
            Some("AF_SMC has no enterprise id (\"smcd ueid add VIRTIO-ISM\")".into())
        }
        Ok(_) => None,
        Err(error) => Some(format!("AF_SMC does not tell its enterprise ids: {error}")),
    }
}
