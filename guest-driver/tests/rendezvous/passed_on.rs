// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A rendezvous passed on to other programs, or offered to them.

use std::os::fd::AsFd;

use super::*;

#[test]
fn a_rendezvous_can_be_passed_on() {
    bed::run(|| {
        let (wire, parent) = (Wire::honest(), attach());
        let passed = parent.pass_on().unwrap();
        // The rendezvous inherited by a child.
        let child = Rendezvous::adopt(&passed.to_string(), Policy::default()).unwrap();
        drop((passed, parent));
        let late = TcpListener::bind(any(0)).unwrap();
        child.listen(&late).unwrap();
        for listener in [child.bind(&any(1)).unwrap(), late] {
            let client = ask(&[&child], &listener);
            let (server, _) = listener.accept().unwrap();
            assert_eq!(options(&wire), answered());
            assert_eq!(child.peer_speaks_smc(&client), Some(true));
            assert_eq!(child.peer_speaks_smc(&server), Some(true));
        }
    });
}

#[test]
fn an_offered_rendezvous_is_opened_once_for_all_programs_and_lasts_as_long_as_they_do() {
    bed::run(|| {
        let (wire, (offered, own)) = (Wire::honest(), Rendezvous::offer().unwrap());
        let serving = std::thread::spawn(move || {
            let mut byte = [0];
            assert_eq!(rustix::io::read(&own, &mut byte), Ok(1), "a program asks");
            Rendezvous::serve(Options::default(), own.as_fd());
        });
        let adopt = || Rendezvous::adopt(&offered.to_string(), Policy::default()).unwrap();
        let first = adopt();
        serving.join().unwrap();
        drop(first);
        let (child, other) = (adopt(), adopt());
        let listener = child.bind(&any(0)).unwrap();
        let client = ask(&[&other], &listener);
        let (server, _) = listener.accept().unwrap();
        assert_eq!(options(&wire), answered());
        assert_eq!(child.peer_speaks_smc(&client), Some(true));
        assert_eq!(other.peer_speaks_smc(&server), Some(true));
    });
}

#[test]
fn adopts_only_what_was_passed_on() {
    bed::run(|| {
        let rendezvous = attach();
        let file = std::fs::File::open("/dev/null").unwrap();
        let no_map = std::os::fd::AsRawFd::as_raw_fd(&file);
        let passed = rendezvous.pass_on().unwrap().to_string();
        let (offered, own) = Rendezvous::offer().unwrap();
        drop(own);
        for text in [
            "",
            "1,2",
            "-,-,-,-,-,-",
            "a,b,c,d,e,f",
            "-1,-,-,-1,-1,-1",
            "9999,-,-,9999,9999,-",
            "offered:",
            "offered:-1",
            "offered:9999",
            &format!("offered:{no_map}"),
            // The process to open the rendezvous has ended.
            &offered.to_string(),
        ] {
            assert!(Rendezvous::adopt(text, Policy::default()).is_err(), "{text}");
        }
        // The descriptors were closed when the text's owner was dropped.
        assert!(Rendezvous::adopt(&passed, Policy::default()).is_err());
        let text = format!("{no_map},-,-,{no_map},{no_map},-");
        assert!(Rendezvous::adopt(&text, Policy::default()).is_err());
    });
}
