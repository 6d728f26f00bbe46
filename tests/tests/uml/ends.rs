// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Guests whose AF_SMC has an enterprise id.

use smc_tests::vm::{Bed, Uml};

pub(super) use smc_tests::vm::ends::{
    End, PORT, all_orders, begin, connection, connection_on, give_eid,
};

/// Two guests whose AF_SMC has an enterprise id.
#[track_caller]
pub(super) fn pair(bed: &Bed) -> [Uml; 2] {
    let guests = bed.boot_uml(["a", "b"], "");
    guests.iter().for_each(give_eid);
    guests
}

/// One guest whose AF_SMC has an enterprise id.
#[track_caller]
pub(super) fn one(bed: &Bed) -> Uml {
    let [guest] = bed.boot_uml(["a"], "");
    give_eid(&guest);
    guest
}
